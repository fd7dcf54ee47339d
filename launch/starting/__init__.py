"""From a command's flags to a training run: what every command that trains does."""
