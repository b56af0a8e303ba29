"""Required bytes without a GPU: a training on the meta device, traced and replayed."""
