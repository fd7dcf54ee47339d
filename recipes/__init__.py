"""Recipes of trainings: one YAML file per table, one recipe per row.

`recipes.schema` is the schema, `recipes.catalog` finds and loads the files.
"""
