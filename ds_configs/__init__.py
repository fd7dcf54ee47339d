"""DeepSpeed configurations of recipes: DeepSpeed's own JSON with "auto" values.

`ds_configs.resolver` fills them from the recipe and refuses what cannot work.
"""
