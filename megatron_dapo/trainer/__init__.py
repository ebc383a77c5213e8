"""The loop, and what it needs to be stopped, resumed and trusted."""
