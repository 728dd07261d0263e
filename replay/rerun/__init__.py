"""Running a recording again, without and with the model."""
