"""A run directory read back, while it runs and afterwards: one way for the doctor, the report and everybody else who asks."""
