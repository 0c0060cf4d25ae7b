"""What the trainer's parts hand to each other: steps, evidence, findings of GradLoc. They import no torch."""
