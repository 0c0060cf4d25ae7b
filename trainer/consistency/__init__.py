"""The consistency mathematics: does the logged policy explain the tokens, and if not, why. Pure numpy and torch; it
knows no actor and no loop."""
