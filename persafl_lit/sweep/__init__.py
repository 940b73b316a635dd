"""Many runs from one file: a plan, its trials, and a launcher that does what is not done yet."""
