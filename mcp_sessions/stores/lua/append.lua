-- needs: session log
-- ARGV: stream, now, new log epoch, window (3), before, after, key, origin, which of the last three
-- there are (three digits)
local ends = redis.call('HGET', base, 'ends')
local stream, now, flags = ARGV[1], tonumber(ARGV[2]), ARGV[11]
if not ends or now >= seconds(ends) then
    return false
end
ends = seconds(ends)
local log = open_or_make_log(stream, ARGV[3], ends)
local window = window_of(log, ends, ARGV[4], ARGV[5], ARGV[6])
local function given(at)
    return string.sub(flags, at, at) == '1' and ARGV[7 + at] or nil
end
local payload, connection, fence, replaced = append(
    log, now, window, ARGV[7], given(1), given(2), given(3))
if not payload then
    return redis.error_reply('EVENTIDS this event log has issued its last id')
end
-- A response stream whose process died is dropped by nobody: what is too old to be replayed
-- leaves it with the first event of a newer one.
local function is_response(name)
    return name and name ~= 'events' and name ~= 'get'
end
if log.head == 1 and is_response(stream) then
    for _, field in ipairs(redis.call('HKEYS', base)) do
        local name = string.match(field, '^l:(.+)$')
        if is_response(name) and name ~= stream then
            local other = open_log(name, ARGV[3], ends)
            local before = other.count
            evict(other, now, window)
            if other.count < before then
                save(other)
            end
            if other.count == 0 then
                redis.call('UNLINK', other.events, other.by_key)
            end
        end
    end
end
return { log.epoch, whole(log.head), payload, connection, fence, replaced }
