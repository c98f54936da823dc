"""`python -m jaxattn.check.faults` prints the table of planted faults."""

from jaxattn.check.faults import FAULTS
from jaxattn.check.faults.table import rows

if __name__ == "__main__":
    print("\n".join(rows(FAULTS)))
