//! Empty: see the manifest. Nothing calls this, and nothing is handed to it.
