"""Training drafters on a target's own answers: the chain computation of scoring, with a loss behind every step."""
