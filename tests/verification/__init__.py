"""`kmg.verify`; the command that calls it has its tests in `commands/`."""
