"""From prompts to scored completions: rewards, environments, and the source that runs both."""
