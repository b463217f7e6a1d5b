"""What every plan is made of: cost, retention, budgets, the executor that does it."""
