"""What a cluster is given to run a recipe: hostfile, batch script, manifest, image, and who sits where."""
