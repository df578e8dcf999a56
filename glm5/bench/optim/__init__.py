"""What splitting matrices by heads does to their updates, and what it costs."""
