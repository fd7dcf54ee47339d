"""How DeepSpeed runs a recipe: DeepSpeed's own JSON with "auto" values, and `ds_configs.resolver`, which fills and checks them."""
