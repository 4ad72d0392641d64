"""The table of trainings that must end on N replicas as they do on one device."""
