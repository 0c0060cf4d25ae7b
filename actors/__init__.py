"""The only room that imports ray: thin shells that give the other rooms a place to run."""
