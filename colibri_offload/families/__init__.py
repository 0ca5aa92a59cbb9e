"""Model families as data: from a checkpoint's own keys and names to a ModelSpec and its slots."""
