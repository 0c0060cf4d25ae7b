"""The rules of the doctor: one module for each kind of what they read, one function for each cause."""
