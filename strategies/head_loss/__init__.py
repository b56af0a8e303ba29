"""The loss of a large head, by chunks of rows of logits that are never held whole."""

from .logits import DeferredLogits as DeferredLogits, deferred as deferred
from .strategy import HeadLoss as HeadLoss
