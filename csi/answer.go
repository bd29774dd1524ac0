package csi

import (
	"context"
	"errors"
	"log/slog"
	"path"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// kinds is the one place where errors become gRPC codes.
var kinds = []struct {
	err  error
	code codes.Code
}{
	{ErrNotFound, codes.NotFound},
	{ErrExists, codes.AlreadyExists},
	{ErrFull, codes.ResourceExhausted},
	{ErrBusy, codes.Aborted},
	{errToken, codes.Aborted},
	{ErrPrecondition, codes.FailedPrecondition},
	{ErrUnavailable, codes.Unavailable},
	{ErrInvalid, codes.InvalidArgument},
	{ErrOutOfRange, codes.OutOfRange},
	{context.DeadlineExceeded, codes.DeadlineExceeded},
	{context.Canceled, codes.Canceled},
}

// Answer gives an error its gRPC code; nil stays nil.
func Answer(err error) error {
	if err == nil {
		return nil
	}
	for _, k := range kinds {
		if errors.Is(err, k.err) {
			return status.Error(k.code, err.Error())
		}
	}
	return status.Error(codes.Internal, err.Error())
}

// Log logs each call with its code and duration; what the sidecars ask every few
// seconds is told at debug level. Requests are not logged: they may hold secrets.
func Log(log *slog.Logger) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		start := time.Now()
		resp, err := handler(ctx, req)
		level := slog.LevelInfo
		if v, ok := req.(interface{ GetVolumeId() string }); !ok || v.GetVolumeId() == "" {
			level = slog.LevelDebug
		}
		attrs := []slog.Attr{slog.String("call", path.Base(info.FullMethod)), slog.Duration("took", time.Since(start))}
		if v, ok := req.(interface{ GetVolumeId() string }); ok {
			attrs = append(attrs, slog.String("volume", v.GetVolumeId()))
		}
		if n, ok := req.(interface{ GetName() string }); ok {
			level = slog.LevelInfo
			attrs = append(attrs, slog.String("name", n.GetName()))
		}
		if err != nil {
			attrs = append(attrs, slog.String("code", status.Code(err).String()), slog.String("error", status.Convert(err).Message()))
			level = slog.LevelWarn
		}
		log.LogAttrs(ctx, level, "csi call", attrs...)
		return resp, err
	}
}
