"""How weights travel from the engine that trains to the generators."""
