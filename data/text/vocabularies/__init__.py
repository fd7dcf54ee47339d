"""From text to tokens: vocabularies trained, published or kept with a store."""
