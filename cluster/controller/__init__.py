"""Who is alive, who should lead, what has to move."""
