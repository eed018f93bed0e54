"""A suite, a condition, a drafter and a runner for specbench, from outside."""
