"""One module per subcommand of `prores`: add_arguments(parser) and run(args)."""
