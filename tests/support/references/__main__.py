"""Writes what tests/endtoend/test_references.py holds the references to: `python -m references`.

To be run where a reference is meant to say something else, and at no other time.
"""

from support.references.fixtures import write_fixtures

if __name__ == "__main__":
    write_fixtures()
