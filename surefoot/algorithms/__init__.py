"""One file per algorithm: its configuration, the engines it needs, the columns it adds, what it minimises."""
