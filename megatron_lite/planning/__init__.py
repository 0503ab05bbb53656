"""What a layout needs and how fast it would be, predicted from the flags alone; tools/plan.py searches with it."""
