"""`python -m jaxattn.check.faults` prints the page of planted faults."""

from jaxattn.check.faults.table import page

if __name__ == "__main__":
    print(page(), end="")
