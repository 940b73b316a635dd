"""How docs/results/README.md is made from the CSV files: what was exported, the page, figures, and one file a topic."""
