"""Models: loading them, running them, training them."""
