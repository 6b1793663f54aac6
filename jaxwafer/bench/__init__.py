"""Speed measured by one procedure: fixed lengths, warm-up, repetitions, ceilings beside every point."""
