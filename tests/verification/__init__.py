"""`kmg.verify`; the tests of the command are in `commands/`."""
