"""What every folder may use: errors, optional extras, atomic files, progress, console. No torch."""
