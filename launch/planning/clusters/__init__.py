"""A recipe on a cluster: hostfile, batch script, manifest, image, and a map of the ranks."""
