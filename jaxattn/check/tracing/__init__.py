"""The ledger of one call, stage by stage."""
