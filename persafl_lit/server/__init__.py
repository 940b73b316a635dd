"""How updates enter the shared model."""
