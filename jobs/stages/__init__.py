"""The kinds of stages a campaign is made of, and what each is given."""
