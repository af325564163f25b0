"""Which of two models answers: rules, a learned chance that the small one suffices, budgets."""
