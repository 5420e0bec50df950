"""What happened in a run: recorded in its folder while it goes on, shown as a page afterwards."""
