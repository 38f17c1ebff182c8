//! Nothing: it is named by features that are off, and only the resolver ever looks at it.
