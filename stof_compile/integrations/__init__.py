"""Other libraries' extension points, each in a module that is imported on request."""
