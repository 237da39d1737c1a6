"""One new row of attention per request over cached keys."""
