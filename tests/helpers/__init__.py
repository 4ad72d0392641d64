"""What tests in more than one folder share: `from helpers.naps import with_naps`."""
