"""The config sections of the trainer, of GradLoc and of the consistency service. They import no torch."""
