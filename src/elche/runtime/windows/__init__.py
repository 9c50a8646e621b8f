"""What a rank does at the ends of steps and windows."""
