"""What the scripts share: text, batches, model, training, run folder, report. Not public."""
