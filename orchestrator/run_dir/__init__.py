"""The files of a run: where each lies, who writes it, and how it is read back."""
