"""A batch becomes new weights; and the consistency mathematics. Pure torch: this room knows no Ray."""
