"""A recipe on a cluster: hostfile, batch script, manifest, image, and a map of its ranks."""
